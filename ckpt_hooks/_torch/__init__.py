"""Every private call into torch: its use, why the public way does not serve, its versions, and when the call may go.

The rest of the package imports private names from the modules of this room alone, so the check of a new release of torch is to
read these and to run the suite. Timings are for torch 2.13 on one x86-64 core.
"""
