"""A short, fast window in front of a long, durable one: recent duplicates never reach the durable store."""

import semel

# In production: cache="redis://cache/0", truth="postgresql://db/app". The rules are the same.
store = semel.tiered(cache="memory:", truth="sqlite:///events.db", cache_window="1h")
once = semel.open(store, consumer="billing", window="7d")

charged: list[str] = []
for delivery in ("evt-1", "evt-2", "evt-1", "evt-1", "evt-2"):
    once.run(delivery, charged.append, delivery)
print(charged)

tiers = once.records.stats().tiers
print("the cache answered", tiers["cache_hits"], "and the truth", tiers["truth_asked"])

once.records.forget("evt-1")  # returns after both have forgotten it
print(once.run("evt-1", charged.append, "evt-1 again"))

once.close()
store.close()

# prints:
# ['evt-1', 'evt-2']
# the cache answered 3 and the truth 2
# Done(value=None)
