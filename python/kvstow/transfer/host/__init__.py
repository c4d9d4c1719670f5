"""Movement of blocks between two memories that the CPU reaches.

`HostMover` plans a job's copies, and one thread per direction carries them out.

May import: kvstow._core, kvstow.transfer.
"""
