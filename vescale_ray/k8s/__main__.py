"""``python -m vescale_ray.k8s FOLDER`` writes the default manifests; ``make manifests`` calls it for deploy/kuberay."""

from __future__ import annotations

import sys
from pathlib import Path

from vescale_ray.k8s.defaults import rendered

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in rendered():
        (folder / name).write_text(text, encoding="utf-8")
