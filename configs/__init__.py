"""The YAML files of a run, installed as ``diloco.configs`` so that Hydra finds them from a wheel too."""
