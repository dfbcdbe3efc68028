"""Plug-ins for frameworks with their own loop: one module each, imported on use."""
