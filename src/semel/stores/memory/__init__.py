"""The store in this process's memory: records, and marks that need no lock."""
