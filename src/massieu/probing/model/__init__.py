"""From a name, a folder, a file or a module to a module that can be read, and its re-initialised copies."""
