"""`python -m asyncgrpo_core.guard STATUS_FD`: the guard process; its instructions come on standard input."""

import sys

from asyncgrpo_core.guard.supervisor import main

sys.exit(main(int(sys.argv[1])))
