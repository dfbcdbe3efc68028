"""Observe mode: count the duplicates that semel would have suppressed, and suppress none."""

import semel

once = semel.open("memory:", consumer="legacy", mode="observe")
handled: list[str] = []

for event in ["a", "b", "a", "c", "a"]:
    once.run(event, handled.append, event)
print(len(handled), "handled,", once.observed.duplicates, "of them duplicates")
once.close()

# prints:
# 5 handled, 2 of them duplicates
