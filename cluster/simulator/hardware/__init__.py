"""Speed of workers, from data sheets or measurements."""
