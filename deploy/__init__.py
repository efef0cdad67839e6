"""What runs vescale-ray on a cluster, and watches it: KubeRay manifests, an image, and for Prometheus and Grafana what they need.

These are data files, read with ``importlib.resources.files("vescale_ray.deploy")``; the tests hold their names, ports
and versions to those of the code. May import nothing but the standard library.
"""
