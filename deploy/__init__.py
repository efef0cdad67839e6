"""What runs vescale-ray on a cluster: the KubeRay RayJob, the image's Dockerfile, Prometheus' scrape configuration and alerts.

These are data files, read with ``importlib.resources.files("vescale_ray.deploy")``; the tests hold their names, ports
and versions to those of the code. May import nothing but the standard library.
"""
