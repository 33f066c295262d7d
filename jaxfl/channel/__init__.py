"""Links that messages travel over, quantisers, and costs of a round: operations, seconds, joules, ledgers."""

from jaxfl.on_use import import_on_use

import_on_use(__name__)
