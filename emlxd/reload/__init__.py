"""From a changed config.yaml to a changed daemon: plan as data, apply whole or not at all."""
