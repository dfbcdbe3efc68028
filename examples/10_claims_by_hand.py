"""Claims by hand: for loops that semel does not run."""

import semel
from semel import Claimed

once = semel.open("sqlite:///events.db", consumer="worker")

claim = once.claim("job-1")
assert isinstance(claim, Claimed)
print(type(once.claim("job-1")).__name__, "for everybody else")
with claim:  # kept alive until the block ends, completed when it ends well
    once.complete(claim, {"rows": 3})
print(once.claim("job-1"))

batch = [each for each in once.claim_many(["job-2", "job-3"]) if isinstance(each, Claimed)]
print([type(verdict).__name__ for verdict in once.complete_many(batch, ["two", "three"])])
once.close()

# prints:
# Busy for everybody else
# Done(value={'rows': 3}, replayed=True)
# ['Completed', 'Completed']
