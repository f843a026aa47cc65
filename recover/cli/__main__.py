"""`python -m recover.cli`: the command `recover` where it is not on the PATH."""

from recover.cli import main

main()
