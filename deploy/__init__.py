"""What runs vescale-ray on a cluster: KubeRay manifests (kuberay/), the image's Dockerfile and Prometheus' scrape configuration.

These are data files, read with ``importlib.resources.files("vescale_ray.deploy")``; the tests hold their names, ports
and versions to those of the code. May import nothing but the standard library.
"""
