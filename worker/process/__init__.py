"""Child processes of a worker, and the end of one whose parent is gone."""
