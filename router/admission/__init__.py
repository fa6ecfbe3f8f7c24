"""Which request goes where, and when: pure decisions."""
