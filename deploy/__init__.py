"""Files that run and monitor vescale-ray on a cluster: KubeRay manifests, an image, and configuration for Prometheus and Grafana.

The data files are read with ``importlib.resources.files("vescale_ray.deploy")``. Tests check that their names, ports and versions match the
code. This package may import only the standard library.
"""
