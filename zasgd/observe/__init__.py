"""What a run leaves to look at: its events, the table made from them, and the picture.

Observes and never decides; nothing here changes what a run does.
"""
