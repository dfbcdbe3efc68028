"""Between the clients and the stores: runs flows, gathers calls into batches, keeps leases, waits."""
