"""How stages run: in one program, in one program per mesh, or in a program per stage."""
