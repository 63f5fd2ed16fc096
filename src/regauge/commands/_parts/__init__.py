"""Parts of single verbs that are too long for the file of the verb."""
