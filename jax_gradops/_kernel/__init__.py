"""How a kernel is declared (`spec`) and run (`invoke`). It knows no op."""
