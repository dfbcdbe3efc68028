"""The store in the memory of this process: records, and marks that need no lock."""
