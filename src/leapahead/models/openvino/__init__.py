"""OpenVINO models as targets."""
