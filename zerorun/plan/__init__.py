"""The plan of what one rank holds and sends, made before anything is allocated: frozen data, for any rank of any world."""
