"""At most once, by its honest name: for metrics and cache warm-ups, many keys in one round trip."""

import semel

metrics = semel.open("sqlite:///events.db", consumer="metrics", mode="mark", window="analytics")

print(metrics.mark("click-1"), metrics.mark("click-1"))
print(metrics.mark_many(["click-1", "click-2", "click-2", "click-3"]))
metrics.close()

# prints:
# True False
# [False, True, False, True]
