"""An effect that cannot be asked about afterwards: after a crash somebody decides, nothing is rerun unasked."""

import semel
from semel import Unknown

once = semel.open("sqlite:///events.db", consumer="letters", mode="quarantine")


def post(letter: str) -> None:
    """The letter may be in the box or not: nobody can tell."""
    raise TimeoutError(f"no answer while posting {letter}")


print(type(once.run("letter-1", post, "letter-1")).__name__)
assert isinstance(once.run("letter-1", post, "letter-1"), Unknown)

record = once.records.lookup("letter-1")
assert record is not None
print("state", record.state)
once.records.resolve("letter-1", fence=record.fence, to="done", value="seen in the box")
print(once.run("letter-1", post, "letter-1"))
once.close()

# prints:
# Unknown
# state unknown
# Done(value='seen in the box', replayed=True)
