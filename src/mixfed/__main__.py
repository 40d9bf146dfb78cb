"""``python -m mixfed`` is the command ``mixfed``."""

from mixfed.cli import main

main()
