"""The options, a file a group: name, type, default, meaning, check and setter of each."""
