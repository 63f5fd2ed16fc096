"""Reports: what run folders hold, as one page to read, one text, or one document for machines.

Reading (`runs`, `series`, `evaluation`) knows files and no prose; `story` turns runs into what is
said; `curves`, `html` and `text` only show it.
"""
