"""`python -m jaxfl`: the command `jaxfl`."""

import sys

from jaxfl.command import main

sys.exit(main())
