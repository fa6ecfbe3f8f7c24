"""Pure decisions: which request goes to which worker, and when."""
