"""Run configurations in the package: ``demo.yaml`` (for ``vescale-ray demo``) and a fuller example.

Data files, read with ``importlib.resources.files("vescale_ray.configs")``.
"""
