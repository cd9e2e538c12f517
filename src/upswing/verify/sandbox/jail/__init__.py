"""The part that runs as a process of its own, without Upswing: it imports only the standard library and itself."""
