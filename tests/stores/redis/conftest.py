"""Which tests of the Redis store run every time.

Those that kill, promote and reshard servers still disturb one another on the servers they share: until each has
its own, they run in `make soak` only.
"""

import os

collect_ignore = (
    []
    if os.environ.get("SEMEL_SOAK")
    else ["test_cluster.py", "test_faults.py", "test_processes.py", "test_sentinel.py", "test_time.py"]
)
