"""An effect that cannot be checked afterwards: after a crash a person decides, and nothing runs again by itself."""

import semel
from semel import Unknown

once = semel.open("sqlite:///events.db", consumer="letters", mode="quarantine")


def post(letter: str) -> None:
    """Post the letter; after the error it may or may not be in the box."""
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
