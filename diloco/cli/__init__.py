"""The command line: ``main`` finds the verb; a verb's file has its arguments, and calls the room that does the work."""
