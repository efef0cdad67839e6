"""``python -m vescale_ray.cli``."""

import sys

from vescale_ray.cli.app import main

sys.exit(main())
