"""`python -m recover.cli`: the command, where it is not on the PATH."""

from recover.cli import main

main()
