"""How long outputs become: predicted by what is asked, and by what ended."""
