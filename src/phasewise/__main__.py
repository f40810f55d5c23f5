"""`python -m phasewise` is the `phasewise` command."""

from phasewise.cli import main

main()
