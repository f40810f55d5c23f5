"""Many models behind one server: loaded when a request names one, unloaded when idle or when memory is short."""
