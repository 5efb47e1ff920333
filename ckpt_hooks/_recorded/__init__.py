"""Recorded frames: a region that is a block of code, brought back by replaying the operators that ran in it.

============== ===================================================================================================
``facts``      what is known of an operator before it runs: which arguments it reads, writes to, returns
``values``     what a tape is made of: operators, their results, storages
``kept``       tensors that are kept: inputs from outside, and what a policy said to keep
``writes``     operators that write to their arguments, as a tape sees them
``recorder``   the dispatch mode that records
``plan``       what backward needs of a tape, and in which order
``replay``     running it again, below autograd
``comparing``  values under a dispatch mode of the user's, compared with those of forward
``frame``      the frame, and its hooks
============== ===================================================================================================
"""
