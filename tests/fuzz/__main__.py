"""Cases of one target, in this process."""

import sys

from tests.fuzz.campaign import main

main(sys.argv[1:])
