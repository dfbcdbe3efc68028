"""Plug-ins for frameworks that bring their own loop: each is one thin file, imported when wanted."""
