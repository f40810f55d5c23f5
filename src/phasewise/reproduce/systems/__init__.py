"""One system per file, each with a constant `SYSTEM`; the module name is the name on the command line."""
