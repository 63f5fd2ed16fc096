"""Parts of single verbs, too long for the verb's file."""
