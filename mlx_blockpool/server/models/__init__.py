"""The models of one server: which are loaded, who waits for which, and how one takes another's place."""
