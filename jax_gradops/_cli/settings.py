class DemoError(Exception): pass
