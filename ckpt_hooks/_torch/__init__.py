"""Every private call into torch: its use, why the public way does not serve, its versions, and when the call may go.

The check of a new release of torch is to read these modules and to run the suite. Timings: torch 2.13, one x86-64 core.
"""
