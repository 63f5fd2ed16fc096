"""The processes of a run: started, watched, named when they fail, and started again."""
