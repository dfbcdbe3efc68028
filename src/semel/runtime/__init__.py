"""The layer between clients and stores: runs flows, gathers calls into batches, renews leases, waits."""
