"""``python -m opendit``: the console command, for torchrun's ``-m`` and where no script is installed."""

import sys

from opendit.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
